"""The simulated world: peers, devices, links, and what is known of them."""
