"""The router: requests in, streams out. It pairs encoders with decoders and never touches a tensor."""
