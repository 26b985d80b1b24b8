"""Whether what deploys Chiasm is true of Chiasm: docker-compose.yml, deploy/ and the program agree."""
