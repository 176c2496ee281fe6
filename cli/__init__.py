"""The `corellm` command: one module a subcommand, option types shared between them."""
