"""Training of adapters beside a frozen span: their weights, passes, gradients, updates and states on one machine."""
