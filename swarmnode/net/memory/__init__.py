"""A network in one process, and an event loop in virtual time: for tests, experiments and the simulator."""
