"""What runs in every rank. It never imports the client."""
