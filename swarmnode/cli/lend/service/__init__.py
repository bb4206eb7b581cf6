"""Command `swarmnode service`: run a node in the background as a service of the user."""
