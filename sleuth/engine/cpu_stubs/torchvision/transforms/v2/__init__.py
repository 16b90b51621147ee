from torchvision import missing_from
from torchvision.transforms import InterpolationMode

__getattr__ = missing_from(__name__)
