"""Ask a gateway as a served teacher is asked; arguments: base URL, API key, protocol.

Prints what it says of tokens 6 and 7 and, where tokens are compared by their texts, why one that calls them otherwise is refused.
"""

import sys

from rollout.teacher import TeacherEndpoint, TeacherError


def main() -> None:
    url, key, protocol = sys.argv[1:]
    teacher = TeacherEndpoint(url, "tiny", api_key=key, protocol=protocol, pieces=lambda token: [f"t{token}"])
    print(teacher.logprobs([5, 6, 7], 1), end=" ")
    stranger = TeacherEndpoint(url, "tiny", api_key=key, protocol=protocol, pieces=lambda token: [f"u{token}"])
    try:
        stranger.logprobs([5, 6, 7], 1)
    except TeacherError as error:
        print(error.reason)


if __name__ == "__main__":
    main()
