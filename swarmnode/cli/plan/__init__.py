"""Commands that plan or simulate a swarm, or try one on this machine, before any machine is lent."""
