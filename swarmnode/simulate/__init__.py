"""Simulation of a swarm in virtual time: peers, links and passes are modelled; the functions of `plan` decide, as on live
nodes."""
