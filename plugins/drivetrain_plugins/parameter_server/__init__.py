"""A parameter server (Li et al., 2014) over ZeroMQ: wire format, layout of the shards, server, client."""
