"""Any torch.nn.Module as a chain of units: exported once, cut, written to a file without code, trained piece by piece."""
