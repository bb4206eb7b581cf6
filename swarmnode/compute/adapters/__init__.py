"""LoRA adapters: small changes to a model's linear layers, which a session may ask for."""
