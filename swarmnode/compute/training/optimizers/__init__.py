"""Update rules beside torch's own, each for one parameter."""
