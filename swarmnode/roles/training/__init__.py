"""The training conversations: a conductor shares out microbatches, trainers feed them, stages compute and count them."""
