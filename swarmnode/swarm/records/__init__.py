"""Signed records: manifest, invite, membership, announcement (`protocol/records.md`). No clock, no socket."""
