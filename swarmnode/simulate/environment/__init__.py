"""Simulated world: peers, devices, links, and the directory that announces them."""
