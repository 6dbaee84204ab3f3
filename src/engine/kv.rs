//! Pages of the latent cache: which are free, and which belong to a sequence. Every rank holds the same pages, since the
//! latent is replicated.

/// Tokens per page.
pub const PAGE: usize = 32;

/// The free pages.
#[derive(Debug)]
pub struct KvPool {
    free: Vec<u32>,
    pages: usize,
}

/// More tokens than the cache has room for.
#[derive(Debug, thiserror::Error)]
#[error("the cache is full: {needed} more pages of {PAGE} tokens are needed, {free} of {pages} are free")]
pub struct CacheFull {
    /// Pages asked for.
    pub needed: usize,
    /// Pages left.
    pub free: usize,
    /// Pages in all.
    pub pages: usize,
}

impl KvPool {
    /// A pool of `pages` free pages.
    pub fn new(pages: usize) -> Self {
        KvPool { free: (0..pages as u32).rev().collect(), pages }
    }

    /// Pages that are free.
    pub fn free(&self) -> usize {
        self.free.len()
    }

    /// Makes room for `tokens` tokens in a block table.
    ///
    /// # Errors
    /// Too few free pages; the table is unchanged then.
    pub fn reserve(&mut self, table: &mut Vec<u32>, tokens: usize) -> Result<(), CacheFull> {
        let needed = tokens.div_ceil(PAGE).saturating_sub(table.len());
        if needed > self.free.len() {
            return Err(CacheFull { needed, free: self.free.len(), pages: self.pages });
        }
        table.extend(self.free.drain(self.free.len() - needed..).rev());
        Ok(())
    }

    /// Takes a sequence's pages back.
    pub fn release(&mut self, table: &mut Vec<u32>) {
        self.free.extend(table.drain(..).rev());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_reserved_once_and_come_back() {
        let mut pool = KvPool::new(3);
        let (mut a, mut b) = (Vec::new(), Vec::new());
        pool.reserve(&mut a, 1).expect("room");
        pool.reserve(&mut a, PAGE).expect("the same page");
        pool.reserve(&mut b, PAGE + 1).expect("room");
        assert_eq!((a.len(), b.len(), pool.free()), (1, 2, 0));
        assert!(pool.reserve(&mut a, PAGE + 1).is_err());
        assert_eq!(a.len(), 1);
        pool.release(&mut b);
        assert_eq!(pool.free(), 2);
        assert!(a.iter().all(|p| !pool.free.contains(p)));
    }
}
