"""Code shared by all APIs: turns requests into generations and parses what the models write."""
