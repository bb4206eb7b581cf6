"""How weights and manifests travel: from whoever has them to whoever needs them."""
