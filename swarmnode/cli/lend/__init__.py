"""Commands for lending this machine."""
