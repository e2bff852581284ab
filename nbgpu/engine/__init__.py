"""The ranks' side: the code in the process of each rank. It does not import the client."""
