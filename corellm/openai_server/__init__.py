"""The HTTP server: OpenAI's API over one engine. What a request may say and how answers look is `corellm.openai_api`'s.

service      one process from the bound port to its end    api_workers  more of them on one port and engine
server       routes and middleware put together            connection   deadlines of sockets
gate         keys and origins                              observe      ids, log lines, metrics and errors of requests
intake       a body to token ids                           answers      token ids to a whole body or a stream of events
state        starting, ready, draining, dead; capacity     routes       what each path does
engine_work  what the engine still has to do, for anybody   worker_process  one of those more processes
"""
