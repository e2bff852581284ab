"""Put numbers and lists into words, in the same way everywhere."""
