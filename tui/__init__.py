"""What CoreLLM draws in a terminal."""
