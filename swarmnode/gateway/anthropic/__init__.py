"""Anthropic's API for chats."""
