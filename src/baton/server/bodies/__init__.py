"""What is read from requests and written into answers, as it stands in JSON."""
