"""Scheduling of the sessions of one stage."""
