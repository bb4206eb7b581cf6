"""A model of a swarm in virtual time: peers, links and passes are modelled; decisions are made by the functions of `plan`, as on
nodes."""
