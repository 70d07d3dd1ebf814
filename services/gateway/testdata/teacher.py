"""Use a gateway as a teacher endpoint. Arguments: base URL, API key, protocol.

Prints the logprobs of tokens 6 and 7 and, if tokens are compared by their texts, the reason for refusing other texts.
"""

import sys

from rollout.teacher import TeacherEndpoint, TeacherError


def main() -> None:
    url, key, protocol = sys.argv[1:]
    teacher = TeacherEndpoint(url, "tiny", api_key=key, protocol=protocol, pieces=lambda token: [f"t{token}"])
    print(teacher.logprobs([5, 6, 7], 1), end=" ")
    mismatched = TeacherEndpoint(url, "tiny", api_key=key, protocol=protocol, pieces=lambda token: [f"u{token}"])
    try:
        mismatched.logprobs([5, 6, 7], 1)
    except TeacherError as error:
        print(error.reason)


if __name__ == "__main__":
    main()
