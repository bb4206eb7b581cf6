"""Who belongs: admission, access control, and what the owner does with the key."""
