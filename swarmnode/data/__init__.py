"""Training data as users keep it: files of records, conversations by a chat template, and samples of tokens with labels."""
