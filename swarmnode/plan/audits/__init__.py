"""Audits: the choice of the sessions and replicas for an audit, and the judgement of its result."""
