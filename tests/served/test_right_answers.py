"""The main job on pictures that were drawn otherwise than those of training: the embedded model's answers over HTTP."""

from concurrent.futures import ThreadPoolExecutor

from tests.served.other_drawings import DRAWINGS
from tests.served.pictures import data_url, image_part, user

LEAST_RIGHT = 0.95  # the committed weights reach more; raise it with better ones


def test_answers_about_pictures_drawn_otherwise(served):
    """Colour, shape, count, existence: most answers are right to the word."""

    def ask(data: bytes, question: str) -> str:
        kind = "png" if data.startswith(b"\x89PNG") else "jpeg"
        message = user(question, image_part(data_url(data, kind)))
        answer = served.chat({"messages": [message], "temperature": 0, "max_tokens": 16})
        return answer.json()["choices"][0]["message"]["content"].strip().rstrip(".").lower()

    asked = [(drawing.file(), *pair) for drawing in DRAWINGS for pair in drawing.questions]
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda one: ask(*one[:2]), asked))
    wrong = [
        f"{question} {answer!r} instead of {right!r}"
        for (_, question, right), answer in zip(asked, answers, strict=True)
        if answer != right
    ]

    assert 1 - len(wrong) / len(asked) >= LEAST_RIGHT, "\n".join(wrong)
