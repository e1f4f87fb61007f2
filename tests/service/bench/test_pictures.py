import io

import pytest
from PIL import Image

from service.bench.pictures import jpeg


@pytest.mark.parametrize("size", [(28, 28), (1280, 960), (1792, 56), (2000, 1000)])
def test_a_picture_is_a_jpeg_of_its_size(size: tuple[int, int]) -> None:
    image = Image.open(io.BytesIO(jpeg(*size)))
    assert (image.format, image.mode, image.size) == ("JPEG", "RGB", size)


def test_a_large_one_has_as_much_detail_as_a_small_one() -> None:
    small, large = len(jpeg(1280, 960)) / (1280 * 960), len(jpeg(2560, 1920)) / (2560 * 1920)
    assert large == pytest.approx(small, rel=0.1)
