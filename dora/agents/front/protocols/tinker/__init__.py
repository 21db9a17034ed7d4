"""The sampling half of Tinker's protocol, for its own client: base URL of the front, key ``tml-`` and the front's key.

Source: the client ``tinker`` 0.38. A sampling session names a version; each sample is a group of sessions of one turn,
or with the base URL ``/sessions/ID`` a turn of that session.

| module | contents |
|---|---|
| ``received`` | names of weights and of sampling sessions; requests for samples, checked |
| ``futures`` | samples under way, and those that a client has yet to fetch |
| ``result`` | a sample in protobuf, by ``sample.proto`` |
| ``routes`` | the routes below ``/api/v1`` |
"""
