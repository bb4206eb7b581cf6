"""What a process tells Prometheus of itself. Rooms below keep plain counts; they are read when somebody asks."""
