"""The page: views of swarms and of this machine in a browser, and the endpoints that provide their data."""
