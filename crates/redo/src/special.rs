//! The special space at the end of an index page, which PostgreSQL calls the opaque area: what each access method notes
//! there differs, how it is found, checked and stored does not.

use walrider_layout::BLCKSZ;
use walrider_layout::page::{Page, PageMut};

use crate::{BlockRedo, RedoError};

/// What an access method keeps in the special space of its pages.
pub trait Special: Sized {
    /// Bytes of the special space.
    const SIZE: usize;
    /// Where on the page it begins.
    const AT: usize = BLCKSZ - Self::SIZE;
    /// The complaint about a page that is not one of the access method.
    const NOT_ONE: &'static str;

    /// Reads it from [`Special::SIZE`] bytes; `None` if they bear the mark of another access method.
    fn read(bytes: &[u8]) -> Option<Self>;

    /// Stores it in as many bytes, its mark included.
    fn store(&self, bytes: &mut [u8]);

    /// That of a page.
    ///
    /// # Errors
    /// When the header makes no sense, or the special space is not the access method's.
    #[inline]
    fn of(page: Page<'_>) -> Result<Self, RedoError> {
        let is_one = page.is_sane() && page.special() == Self::AT;
        let special = if is_one { Self::read(&page.0[Self::AT..]) } else { None };
        special.ok_or(RedoError::CorruptPage(Self::NOT_ONE))
    }

    /// Stores it on a page that is known to be one of the access method.
    #[inline]
    fn put(&self, page: &mut PageMut<'_>) {
        self.store(&mut page.0[Self::AT..]);
    }

    /// Changes that of a page.
    ///
    /// # Errors
    /// As [`Special::of`].
    fn change(page: &mut PageMut<'_>, change: impl FnOnce(&mut Self)) -> Result<(), RedoError> {
        let mut special = Self::of(page.get())?;
        change(&mut special);
        special.put(page);
        Ok(())
    }
}

impl BlockRedo<'_, '_> {
    /// Initialises the page with this special space.
    ///
    /// # Errors
    /// When the record does not say that it initialises the page.
    pub fn init_with<S: Special>(&mut self, special: &S) -> Result<(), RedoError> {
        self.init_page(S::SIZE)?;
        special.put(&mut self.page);
        Ok(())
    }

    /// Changes nothing but the special space, if the page, which must exist, is to be changed at all.
    ///
    /// # Errors
    /// When the record initialises the page instead, or the page is not one of the access method.
    pub fn change_special<S: Special>(&mut self, change: impl FnOnce(&mut S)) -> Result<(), RedoError> {
        if self.needs_redo()? { self.changed_special(change) } else { Ok(()) }
    }

    /// Changes the special space, whatever the outcome of the page, and ends the page's redo.
    ///
    /// # Errors
    /// When the page is not one of the access method.
    pub fn changed_special<S: Special>(&mut self, change: impl FnOnce(&mut S)) -> Result<(), RedoError> {
        S::change(&mut self.page, change)?;
        self.changed();
        Ok(())
    }
}
