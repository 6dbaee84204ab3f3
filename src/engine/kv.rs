//! Pages of the latent cache: which are free, who owns the others, and which keep a text for whoever comes with the same
//! one. Every rank holds the same pages, since the latent is replicated.

use super::prefix::{Prefix, Root};

/// Tokens per page.
pub const PAGE: usize = 32;

/// The pages and their owners.
#[derive(Debug)]
pub struct KvPool {
    free: Vec<u32>,
    /// How many sequences have each page in their block table.
    owners: Vec<u32>,
    prefix: Prefix,
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

/// How many pages are in which state; together they are all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PageCounts {
    /// Empty.
    pub free: usize,
    /// In the block table of a sequence.
    pub owned: usize,
    /// In none, but with a text that may come again.
    pub cached: usize,
}

impl KvPool {
    /// A pool of `pages` free pages.
    pub fn new(pages: usize) -> Self {
        KvPool { free: (0..pages as u32).rev().collect(), owners: vec![0; pages], prefix: Prefix::default() }
    }

    /// Pages that are free, or will be when somebody needs them.
    pub fn free(&self) -> usize {
        self.free.len() + self.prefix.unowned()
    }

    /// The states of all pages.
    pub fn counts(&self) -> PageCounts {
        let (free, cached) = (self.free.len(), self.prefix.unowned());
        PageCounts { free, owned: self.owners.len() - free - cached, cached }
    }

    /// Makes room for `tokens` tokens in a block table, if need be in place of texts that nobody has, the longest unused
    /// first.
    ///
    /// # Errors
    /// Too few free pages; the table is unchanged then.
    pub fn reserve(&mut self, table: &mut Vec<u32>, tokens: usize) -> Result<(), CacheFull> {
        let needed = tokens.div_ceil(PAGE).saturating_sub(table.len());
        if needed > self.free() {
            return Err(CacheFull { needed, free: self.free(), pages: self.owners.len() });
        }
        for _ in 0..needed {
            let Some(page) = self.free.pop().or_else(|| self.prefix.forget_oldest()) else { break };
            self.owners[page as usize] = 1;
            table.push(page);
        }
        Ok(())
    }

    /// Gives back the pages of a table that `tokens` tokens do not need.
    pub fn trim(&mut self, table: &mut Vec<u32>, tokens: usize) {
        let kept = tokens.div_ceil(PAGE).min(table.len());
        for page in table.drain(kept..).rev() {
            let owners = &mut self.owners[page as usize];
            *owners -= 1;
            if *owners == 0 && !self.prefix.leave(page) {
                self.free.push(page);
            }
        }
    }

    /// Takes a sequence's pages back.
    pub fn release(&mut self, table: &mut Vec<u32>) {
        self.trim(table, 0);
    }

    /// Puts into an empty table the pages that hold the beginning of `ids`, and returns how many tokens that is. The last
    /// id is never among them: it has to run.
    pub fn share(&mut self, root: &Root, ids: &[u32], table: &mut Vec<u32>) -> usize {
        let most = ids.len().saturating_sub(1) / PAGE;
        for page in self.prefix.find(root, &ids[..most * PAGE]) {
            self.owners[page as usize] += 1;
            table.push(page);
        }
        table.len() * PAGE
    }

    /// Keeps what a table's whole pages hold, `ids` of them run, for others to share.
    pub fn keep(&mut self, root: &Root, ids: &[u32], table: &[u32]) {
        self.prefix.keep(root, ids, table);
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

    #[test]
    fn a_kept_text_is_shared_until_its_pages_are_needed() {
        let (root, ids): (Root, Vec<u32>) = (Root::default(), (0..80).collect());
        let mut pool = KvPool::new(4);
        let (mut a, mut b, mut c) = (Vec::new(), Vec::new(), Vec::new());
        pool.reserve(&mut a, 80).expect("room");
        pool.keep(&root, &ids, &a);
        assert_eq!(pool.share(&root, &ids, &mut b), 2 * PAGE, "the third page is not whole");
        assert_eq!(b, a[..2]);
        pool.release(&mut a);
        assert_eq!(pool.counts(), PageCounts { free: 2, owned: 2, cached: 0 });
        pool.release(&mut b);
        assert_eq!(pool.counts(), PageCounts { free: 2, owned: 0, cached: 2 });
        assert_eq!(pool.share(&root, &ids[..2 * PAGE], &mut b), PAGE, "the last token has to run");
        assert_eq!(pool.share(&Root::new("another key"), &ids, &mut c), 0);
        pool.reserve(&mut c, 3 * PAGE).expect("in place of the second page");
        assert_eq!(pool.counts(), PageCounts { free: 0, owned: 4, cached: 0 });
        pool.release(&mut b);
        pool.release(&mut c);
        assert_eq!(pool.share(&root, &ids, &mut a), PAGE, "the second is forgotten");
    }
}
