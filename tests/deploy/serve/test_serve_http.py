"""A server as clients see it: answers equal to the model's own, refusals in one sentence."""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
import torch
import tritonclient.http as triton
from prometheus_client.parser import text_string_to_metric_families
from safetensors.torch import save_file
from scipy.stats import entropy

import _serving
import _tiny
import ensbridge as eb
from _saving import model, small
from _serving import infer, pixels, png, request_for, send, serving, upload
from ensbridge.deploy.serve.limits import Limits
from ensbridge.methods import BridgeConfig
from ensbridge.models.fast_ensemble import FastEnsemble

TOKEN = "a-secret"
AUTHORISED = {"Authorization": f"Bearer {TOKEN}"}
LIMITS = Limits(body=200_000, images=20, pixels=10_000, batch=4, queue=64)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of two bridges, one of five steps, with the weights of another member beside it."""
    place = tmp_path_factory.mktemp("serve") / "model"
    small(BridgeConfig(), BridgeConfig()).save(place, image_shape=(3, 8, 8), class_names=_serving.NAMES)
    other = small(BridgeConfig(), BridgeConfig()).source
    for weight in other.parameters():
        weight.data += 0.1
    state = {name: tensor.contiguous() for name, tensor in other.state_dict().items()}
    save_file(state, place / "member.safetensors")
    return place


@pytest.fixture(scope="module")
def base(folder: Path) -> Iterator[str]:
    members = (str(folder / "member.safetensors"),)
    with serving(_serving.registry(folder, f"second={folder}", members=members, limits=LIMITS)) as address:
        yield address


@pytest.fixture(scope="module")
def fast(folder: Path) -> FastEnsemble:
    return eb.load(folder)


@torch.no_grad()
def both(fast: FastEnsemble, images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    ours, source = fast.with_source(torch.from_numpy(images))
    return ours.numpy(), source.numpy()


def one_sentence(answer: _serving.Answer, status: int) -> str:
    """The sentence of a refusal, and nothing else."""
    assert answer.status == status, answer
    assert answer.headers["content-type"] == "application/json"
    document = answer.json()
    assert list(document) == ["error"]
    sentence = document["error"]
    assert sentence.isprintable()
    assert "Traceback" not in sentence
    return sentence


# ------------------------------------------------------------------------------ protocol v2


@pytest.mark.parametrize("binary", [True, False])
def test_tritons_client_gets_the_models_own_logits(base: str, fast: FastEnsemble, binary: bool) -> None:
    client = triton.InferenceServerClient(base.removeprefix("http://"))
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("model", "1")
    assert not client.is_model_ready("other")
    assert client.get_server_metadata()["name"] == "ensbridge"
    described = client.get_model_metadata("model")
    assert described["inputs"] == [{"name": "images", "datatype": "FP32", "shape": [-1, 3, 8, 8]}]
    assert [output["name"] for output in described["outputs"]] == ["logits", "source_logits"]
    assert [entry["name"] for entry in client.get_model_repository_index()] == ["model", "second"]

    images = _tiny.images(7).numpy()  # more than a batch
    tensor = triton.InferInput("images", list(images.shape), "FP32")
    tensor.set_data_from_numpy(images, binary_data=binary)
    wanted = [triton.InferRequestedOutput(name, binary_data=binary) for name in ("logits", "source_logits")]
    for outputs in (wanted, None):
        result = client.infer("model", [tensor], outputs=outputs, request_id="abc")
        assert result.get_response()["id"] == "abc"
        for name, expected in zip(("logits", "source_logits"), both(fast, images), strict=True):
            np.testing.assert_allclose(result.as_numpy(name), expected, atol=1e-5)
    client.close()


def test_nested_lists_and_a_single_output_are_understood(base: str, fast: FastEnsemble) -> None:
    images = _tiny.images(2).numpy()
    request = request_for(images)
    request["inputs"][0]["data"] = images.tolist()
    request["outputs"] = [{"name": "source_logits"}]
    (output,) = infer(base, "model", request).json()["outputs"]
    assert (output["name"], output["shape"]) == ("source_logits", [2, 3])
    np.testing.assert_allclose(np.reshape(output["data"], (2, 3)), both(fast, images)[1], atol=1e-5)


IMAGE = np.zeros((1, 3, 8, 8), np.float32)


def changed(**values: Any) -> dict[str, Any]:
    request = request_for(IMAGE)
    request["inputs"][0].update(values)
    return request


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"", 400),
        (b"{", 400),
        (b"[" * 100_000, 400),
        (b"\xff\xfe", 400),
        ({"inputs": []}, 400),
        (changed(name="pixels"), 400),
        (changed(datatype="FP16"), 400),
        (changed(shape=[1, 3, 9, 8]), 400),
        (changed(shape=[0, 3, 8, 8], data=[]), 400),
        (changed(shape=[-1, 3, 8, 8]), 400),
        (changed(shape=[21, 3, 8, 8]), 413),
        (changed(shape=[2**40, 3, 8, 8]), 400),
        (changed(data=[0.0]), 400),
        (changed(data=["0.0"] * 192), 400),
        (changed(data=[[0.0], [0.0, 1.0]]), 400),
        (changed(data=[10**400] * 192), 400),
        (changed(data=[1e300] * 192), 400),
        (changed(data=None), 400),
        (changed(parameters={"binary_data_size": 768}), 400),
        (b'{"inputs": [{"name": "images", "shape": [1], "datatype": "FP32", "data": [NaN]}]}', 400),
        ({**request_for(IMAGE), "outputs": [{"name": "\x1b[2Jprobabilities"}]}, 400),
        ({**request_for(IMAGE), "outputs": [{"name": "logits", "parameters": {"classification": 2}}]}, 400),
    ],
)
def test_a_wrong_inference_gets_one_sentence(base: str, request_: Any, status: int) -> None:
    one_sentence(infer(base, "model", request_), status)


@pytest.mark.parametrize(
    ("length", "tail"), [("0", b""), ("x", b""), ("-1", b""), ("999999", b""), ("9" * 30, b""), ("²", b"")]
)
def test_a_wrong_header_length_gets_one_sentence(base: str, length: str, tail: bytes) -> None:
    header = {"Inference-Header-Content-Length": length.encode().decode("latin-1")}
    one_sentence(infer(base, "model", request_for(IMAGE), tail, **header), 400)


def test_binary_data_that_does_not_fit_gets_one_sentence(base: str) -> None:
    request = request_for(IMAGE)
    request["inputs"][0]["parameters"] = {"binary_data_size": IMAGE.nbytes}
    for tail in (b"", IMAGE.tobytes()[:-1], IMAGE.tobytes() + b"\0"):
        assert "768" in one_sentence(infer(base, "model", request, tail), 400)
    one_sentence(infer(base, "model", request, np.full_like(IMAGE, np.nan).tobytes()), 400)
    assert infer(base, "model", request, IMAGE.tobytes()).status == 200


def test_what_is_not_there_gets_one_sentence(base: str) -> None:
    assert "model, second" in one_sentence(infer(base, "third", request_for(IMAGE)), 404)
    one_sentence(send(base, "GET", "/v2/models/model/versions/2"), 404)
    one_sentence(send(base, "GET", "/nowhere"), 404)
    one_sentence(send(base, "DELETE", "/v1/model"), 405)
    one_sentence(send(base, "GET", "/v1/model?model=third"), 404)
    one_sentence(send(base, "POST", "/v2/repository/models/model/load", b"{}"), 403)


# ------------------------------------------------------------------------------ /v1


def test_predictions_are_those_of_the_model_and_its_source(base: str, fast: FastEnsemble) -> None:
    arrays = [pixels(seed) for seed in range(3)]
    answer = upload(
        base, *((f"{number}.png", png(array)) for number, array in enumerate(arrays)), query="?top=2"
    )
    assert answer.status == 200
    images = (np.stack(arrays) / 255).astype(np.float32).transpose(0, 3, 1, 2)
    ours, source = (torch.from_numpy(rows).double().softmax(-1).numpy() for rows in both(fast, images))
    predictions = answer.json()["predictions"]
    assert [prediction["image"] for prediction in predictions] == ["0.png", "1.png", "2.png"]
    for prediction, probs, alone in zip(predictions, ours, source, strict=True):
        best = np.argsort(-probs)[:2]
        assert [entry["class_index"] for entry in prediction["probabilities"]] == best.tolist()
        listed = [entry["probability"] for entry in prediction["probabilities"]]
        np.testing.assert_allclose(listed, probs[best], atol=1e-5)
        assert prediction["label"] == _serving.NAMES[best[0]]
        assert prediction["source"]["label"] == _serving.NAMES[alone.argmax()]
        uncertainty = prediction["uncertainty"]
        assert uncertainty["entropy"] == pytest.approx(entropy(probs), abs=1e-5)
        assert uncertainty["msp"] == pytest.approx(1 - probs.max(), abs=1e-5)
        assert uncertainty["disagreement"] == pytest.approx(abs(probs - alone).sum() / 2, abs=1e-5)
        assert (prediction["steps"], prediction["ensemble"]) == (None, None)


def test_steps_end_where_the_bridges_do_and_the_ensemble_is_the_true_one(
    base: str, fast: FastEnsemble, folder: Path
) -> None:
    array = pixels(5)
    (prediction,) = upload(base, ("a.png", png(array)), query="?steps=true&ensemble=true").json()[
        "predictions"
    ]
    image = torch.from_numpy((array / 255).astype(np.float32).transpose(2, 0, 1))[None]
    with torch.no_grad():
        assert [path["times"] for path in prediction["steps"]] == [[1.0, 0.0]] * 2
        ends = torch.tensor(
            [[entry["probability"] for entry in path["states"][-1]] for path in prediction["steps"]]
        )
        # Before calibration the model is the mean of its bridges.
        fast_logits = fast(image) * fast.temperature
        order = [entry["class_index"] for entry in prediction["probabilities"]]
        torch.testing.assert_close(ends.mean(0), fast_logits.softmax(-1)[0][order], atol=1e-5, rtol=0)
        member = eb.load(folder).source
        for weight in member.parameters():
            weight += 0.1
        mean = (fast.source(image).softmax(-1) + member(image).softmax(-1)) / 2
    true = prediction["ensemble"]
    order = [entry["class_index"] for entry in true["probabilities"]]
    listed = torch.tensor([entry["probability"] for entry in true["probabilities"]])
    torch.testing.assert_close(listed, mean[0][order], atol=1e-5, rtol=0)


def bomb(width: int, height: int) -> bytes:
    """A PNG of a few bytes that says it is large."""
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", head), (b"IDAT", zlib.compress(b"\0" * 10)), (b"IEND", b"")]
    body = b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + body


@pytest.mark.parametrize("content", [b"", b"GIF89a", bomb(101, 100), bomb(2**30, 2**30), png(pixels())[:60]])
def test_an_image_that_cannot_be_read_is_named(base: str, content: bytes) -> None:
    good = png(pixels())
    assert "b.png" in one_sentence(upload(base, ("a.png", good), ("b.png", content)), 422)
    assert upload(base, ("a.png", good)).status == 200


def test_what_is_wrong_with_an_upload_is_said(base: str) -> None:
    good = png(pixels())
    one_sentence(upload(base, *[("a.png", good)] * 21), 413)
    one_sentence(upload(base, ("a.png", good), query="?top=0"), 422)
    one_sentence(upload(base, ("a.png", good), query="?model=second&ensemble=true"), 422)
    one_sentence(upload(base), 422)
    body, headers = _serving.multipart(("a.png", good), field="files")
    one_sentence(send(base, "POST", "/v1/predict", body, headers), 422)
    one_sentence(send(base, "POST", "/v1/predict", b"nothing", {"Content-Type": "multipart/form-data"}), 400)
    assert upload(base, ("a.png", good), query="?model=second").json()["model"] == "second"


def test_a_model_is_described(base: str, fast: FastEnsemble) -> None:
    described = send(base, "GET", "/v1/model").json()
    assert (described["name"], described["models"]) == ("model", ["model", "second"])
    assert described["classes"] == list(_serving.NAMES)
    assert described["cost"]["model"]["macs"] == eb.cost.count_macs(fast, torch.zeros(1, 3, 8, 8))
    assert described["cost"]["ensemble"]["ratio"] == 2
    assert described["card"].startswith("---\nlibrary_name: ensbridge")


# ------------------------------------------------------------------------------ limits, token, metrics


def test_a_request_that_is_too_large_or_compressed_is_refused(base: str) -> None:
    assert "200,000" in one_sentence(infer(base, "model", b" " * 200_001), 413)
    one_sentence(infer(base, "model", request_for(IMAGE), **{"Content-Encoding": "gzip"}), 415)


def test_requests_side_by_side_are_batched_and_never_mixed_up(base: str, fast: FastEnsemble) -> None:
    images = _tiny.images(40, seed=3).numpy()
    expected = both(fast, images)[0]

    def ask(number: int) -> None:
        if number % 5 == 0:  # one in five is wrong
            assert infer(base, "model", changed(data=[float(number)])).status == 400
            return
        answer = infer(base, "model", request_for(images[number : number + 1]))
        np.testing.assert_allclose(answer.json()["outputs"][0]["data"], expected[number], atol=1e-5)

    with ThreadPoolExecutor(10) as pool:
        list(pool.map(ask, range(40)))
    families = text_string_to_metric_families(send(base, "GET", "/metrics").body.decode())
    samples = {
        (sample.name, sample.labels.get("model")): sample.value
        for each in families
        for sample in each.samples
    }
    images_seen, batches = (
        samples[name, "model"] for name in ("ensbridge_images_total", "ensbridge_batch_images_count")
    )
    assert images_seen >= 32
    assert batches < images_seen


def test_what_takes_too_long_or_waits_too_long_is_refused(folder: Path) -> None:
    models = _serving.registry(folder, limits=Limits(seconds=1, queue=2, wait_ms=0, bodies=10_000))
    served, go = models.find(), threading.Event()
    compute = served.predict._compute
    served.predict._compute = lambda images: (go.wait(10), compute(images))[1]
    with serving(models) as base, ThreadPoolExecutor(4) as pool:
        with socket.create_connection(urlsplit(base).netloc.split(":"), timeout=10) as slow:
            slow.sendall(b"POST /v2/models/model/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n{")
            two = request_for(np.concatenate([IMAGE, IMAGE]))
            running = pool.submit(infer, base, "model", request_for(IMAGE))
            while not served.predict.running:
                time.sleep(0.005)
            waiting = pool.submit(infer, base, "model", two)
            while served.waiting < 2:
                time.sleep(0.005)
            refused = infer(base, "model", request_for(IMAGE))
            one_sentence(refused, 429)
            assert refused.headers["retry-after"] == "1"
            one_sentence(infer(base, "model", b" " * 9_000), 429)  # with those that wait it is too much
            for late in (running.result(), waiting.result()):
                one_sentence(late, 503)
                assert late.headers["retry-after"] == "1"
            assert slow.recv(1000).startswith(b"HTTP/1.1 408 ")
        go.set()
        assert infer(base, "model", request_for(IMAGE)).status == 200
        assert b"ensbridge_body_bytes 0.0" in send(base, "GET", "/metrics").body


def test_a_token_is_asked_for_except_by_the_page_and_health(folder: Path) -> None:
    with serving(_serving.registry(folder, limits=LIMITS), TOKEN) as base:
        for path in ("/", "/healthz", "/v2/health/ready", "/openapi.json"):
            assert send(base, "GET", path).status == 200
        for headers in ({}, {"Authorization": TOKEN}, {"Authorization": "Bearer wrong"}):
            for path in ("/v1/model", "/v2", "/metrics", "/nowhere"):
                one_sentence(send(base, "GET", path, headers=headers), 401)
        assert send(base, "GET", "/v1/model", headers=AUTHORISED).status == 200
        assert send(base, "GET", "/openapi.json").json()["paths"]["/v2"]["get"]["security"] == [
            {"bearer": []}
        ]


def test_a_model_is_loaded_again_while_requests_are_served(tmp_path: Path) -> None:
    place = tmp_path / "model"
    old, new = (model(source=_tiny.member(seed), image_shape=(3, 8, 8)) for seed in (0, 1))
    old.save(place)
    images = _tiny.images(1).numpy()
    with serving(_serving.registry(place, limits=LIMITS), TOKEN) as base:

        def logits() -> list[float]:
            answer = infer(base, "model", request_for(images), **AUTHORISED)
            assert answer.status == 200
            return answer.json()["outputs"][0]["data"]

        np.testing.assert_allclose(logits(), both(old, images)[0][0], atol=1e-5)
        new.save(place)
        load = "/v2/repository/models/model/load"
        with ThreadPoolExecutor(5) as pool:
            answers = [pool.submit(logits) for _ in range(40)]
            loading = pool.submit(send, base, "POST", load, b"{}", AUTHORISED)
            answers += [pool.submit(logits) for _ in range(40)]
        assert loading.result().status == 200
        possible = [both(each, images)[0][0] for each in (old, new)]
        for answer in answers:
            assert any(np.allclose(answer.result(), logits, atol=1e-5) for logits in possible)
        np.testing.assert_allclose(logits(), possible[1], atol=1e-5)

        (place / "config.json").write_text("{}")  # damaged: the loaded one stays
        one_sentence(send(base, "POST", load, b"{}", AUTHORISED), 409)
        body = json.dumps({"parameters": {"config": "{}"}}).encode()
        one_sentence(send(base, "POST", load, body, AUTHORISED | {"Content-Type": "application/json"}), 400)
        np.testing.assert_allclose(logits(), possible[1], atol=1e-5)


def test_each_example_of_the_page_is_a_png(base: str) -> None:
    names = send(base, "GET", "/examples/").json()
    assert names == ["ship", "aeroplane", "car", "frog", "blend", "noise"]
    for name in names:
        assert send(base, "GET", f"/examples/{name}.png").body.startswith(b"\x89PNG")
    assert send(base, "GET", "/examples/cat.png").status == 422
