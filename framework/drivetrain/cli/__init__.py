"""What happens between the command line and the first worker, and what is said afterwards."""
