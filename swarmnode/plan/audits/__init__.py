"""Audits: how much of what others computed is looked at, by whom, and what follows."""
