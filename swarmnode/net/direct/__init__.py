"""Direct TCP connections between peers that p2pd has introduced: a stream's bytes then pass no other process."""
