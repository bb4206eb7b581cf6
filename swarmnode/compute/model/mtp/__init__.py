"""Multi-token prediction (MTP): a layer of the model itself that guesses the token after next."""
