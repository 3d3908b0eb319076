//! Full-page images: from the stored bytes back to the page (`RestoreBlockImage`, `access/transam/xlogreader.c`).

use walrider_layout::PageBytes;

use crate::record::Image;

/// The image does not decompress to a page.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("image does not decompress to a page")]
pub struct ImageError;

/// Restores the page from its image; the hole becomes zeros.
///
/// # Errors
/// When compressed bytes do not decompress to exactly the page without its hole. The page is then undefined.
pub fn restore(_image: &Image<'_>, _page: &mut PageBytes) -> Result<(), ImageError> {
    Err(ImageError)
}
