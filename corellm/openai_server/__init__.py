"""The HTTP server: OpenAI's API over one engine. What a request may say and how answers look is `corellm.openai_api`'s.

connection   deadlines of sockets            app          routes and middleware put together
intake       body to token ids               answers      token ids to a whole body or a stream of events
state        ready, draining, dead; room     service      one process from the bound port to its end
"""
