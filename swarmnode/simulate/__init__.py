"""A discrete-event simulation of a swarm, which decides with the code that live nodes decide with."""
