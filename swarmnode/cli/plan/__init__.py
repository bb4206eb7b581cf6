"""Commands that plan a swarm, or try one, before anybody lends a machine."""
