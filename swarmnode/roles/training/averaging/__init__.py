"""All-reduce between replicas, over links."""
