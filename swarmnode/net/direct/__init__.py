"""Direct TCP connections between peers that p2pd has introduced: what a stream carries then passes no other process."""
