"""Conversations: their branches, their files, the commands that act on them, and who answers. Draws nothing."""
