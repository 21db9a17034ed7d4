"""The agents' door: an HTTP server that speaks the protocols of OpenAI, vLLM and others, over a service's sessions.

It is a process of its own and talks to the service by gRPC alone, so JSON, chat templates and tool calls never load the
orchestrator's event loop.

| module | contents |
|---|---|
| ``source`` | what the front needs of a service: ``SessionSource``, ``SessionHandle`` |
| ``service`` | the same over gRPC |
| ``received`` | ``Wanted``: a request for turns, checked; each field is offered, or refused by name |
| ``turns`` | ``RunningTurn``: a turn that goes on although its client has left |
| ``sessions`` | the sessions of agents: ids, branches, rewards, ends |
| ``keys``, ``site`` | ids and keys of sessions; requests of web pages |
| ``replays`` | retries of a request get the turns of its first call |
| ``gateway`` | all of it together: whose call it is, limits, and the turns that it gets |
| ``chat``, ``completions``, ``responses``, ``anthropic``, ``tokens``, ``control`` | the routes |
| ``tinker`` | the routes of Tinker's sampling half |
| ``model``, ``parts`` | the served model; parts of replies |
| ``errors``, ``http`` | refusals as HTTP statuses; bodies and server-sent events |
| ``app``, ``listening`` | the aiohttp application, and its socket |
| ``run``, ``child`` | a front as a process, and the process of ``dora serve --http`` |
"""
