"""A program for the environment of Tinker's client: prints the fields of its messages, by their names."""

import json

from tinker.proto import tinker_public_pb2 as pb

FIELDS = {
    name: {field.name: [field.number, field.type] for field in message.fields}
    for name, message in pb.DESCRIPTOR.message_types_by_name.items()
}
STOPS = {value.name: value.number for value in pb.StopReason.DESCRIPTOR.values}
print(json.dumps({"fields": FIELDS, "stops": STOPS}))
